"""Training: settings, the loop, evaluation, loggers, and where time goes."""
