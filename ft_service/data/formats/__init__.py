"""The shapes in which people's data comes, recognised by content.

recognise    which format a record has, by its keys; which container a file is, by its first bytes: pure
containers   a file's records by number, whichever container holds them (JSON lines, a JSON array, CSV, Parquet, Arrow)
tables       the containers that are tables
alike        a record of any format as one of ft_service/data/records.py
folders      which files of a folder hold a dataset
writing      records as lines of JSON
reading      both together: a file's numbered Records and Faults
"""
