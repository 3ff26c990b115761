"""Routes of the page for browsers, below `/`.

They ask the API for everything, as any client does.
"""
