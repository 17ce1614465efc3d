"""The processes of one job: their controller, and what each of them does."""
