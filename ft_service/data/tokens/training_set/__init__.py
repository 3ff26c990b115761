"""What training takes of token sets: which samples, and what they are like in numbers.

contents      samples that are the same
split         samples set aside for validation
windows       documents, in windows and rows
measure       lengths, targets, doubles and overlap (ft_service/data/statistics.py)
"""
