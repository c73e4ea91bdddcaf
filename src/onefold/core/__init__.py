"""Shared helpers: argument checks, batches, storage, memory, signals, progress and provenance."""
