"""Islands: replicas of the model that train on their own, and meet every few steps."""
