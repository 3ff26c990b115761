"""Replacements in transformers that processes of the service need too; the rules are those of
`workers.patches`.
"""
