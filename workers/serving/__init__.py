"""The preview: one base with any number of adapters answers chat completions, in a process of its
own.
"""
