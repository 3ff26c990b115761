"""The documentation's site: pages that are made from the code, and the build."""
