"""The page for browsers: templates and what they need, its static files, and its way to the API."""
