"""The parts of one job that are not its base: adapter parameters, optimizer, position, best
validation, origins.
"""
