"""Formats of data files, recognised by content.

columns        the names that a user's file gives to a format's columns
detect_format  a file's container, from its first bytes; a record's format, from its keys
containers     numbered records of JSON lines and JSON arrays        tabular  those of CSV, Parquet
               and Arrow
normalize      a record of any format as one of the kinds in ft_service/data/sample_kinds.py
reading        a file's numbered records and faults, by all of the above
media          pictures, films and sound, which are refused        unknown_formats  what other files
               are, and what to write
folders        the files of a folder that hold a dataset             writing  records as lines of
               JSON
"""
