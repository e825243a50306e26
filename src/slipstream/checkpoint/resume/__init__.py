"""What `TrainingState` needs to restore everything or nothing: compare before a load, undo after one, random states."""
