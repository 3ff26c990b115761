"""Client of the REST interface: connection, responses, progress of a job."""
