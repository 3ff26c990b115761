"""What belongs to jobs beside the jobs themselves: sweeps of them, and plans of what they take."""
