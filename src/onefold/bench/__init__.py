"""The distribution-shift benchmark: units of work, where they run, and what they leave behind."""
