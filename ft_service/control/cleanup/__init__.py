"""What is removed: expired data, deleted jobs and projects, what a person prunes."""
