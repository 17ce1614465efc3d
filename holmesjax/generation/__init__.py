"""Text from trained models: tokens drawn one by one, for several texts at once."""
