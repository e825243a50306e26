"""What a run folder contains: paths, metrics and evaluations. Training writes it, the report reads it; no torch."""
