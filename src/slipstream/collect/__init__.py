"""Collectors: rollouts one after another, collected while others train, and packed while they train."""
