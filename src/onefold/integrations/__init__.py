"""onefold inside other libraries."""
