"""Storage formats of the frozen base: plain numeric functions per format, and the tensor subclass
that carries them.
"""
