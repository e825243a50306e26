"""Collectors: one rollout after another, rollouts collected during training, and rollouts packed in memory."""
