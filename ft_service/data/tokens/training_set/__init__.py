"""Token sets for training.

split             samples set aside for validation, and digests by which equal samples are found
windows           documents split into windows, and rows of them
token_statistics  lengths, targets, duplicates and overlap (ft_service/data/statistics.py)
"""
