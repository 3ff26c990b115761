"""Reading data files beside the loop that moves jobs: checks before a job may start, samples for those who want to see them."""
