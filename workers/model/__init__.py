"""The model: built on meta, its frozen linears in their storage formats, adapters by PEFT, weights
read row by row.
"""
