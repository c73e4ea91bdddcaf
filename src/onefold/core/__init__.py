"""What every package needs: argument checks, storage, memory, signals, progress and provenance."""
