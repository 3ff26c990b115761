"""Work for callers in what all of them share: who is next, how much may wait, and whose fault an
end is.
"""
