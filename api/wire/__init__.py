"""OpenAI's objects and errors as this service writes them, and the bodies of chats that it reads.

Pure.
"""
