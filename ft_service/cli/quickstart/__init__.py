"""`ft quickstart`: one job on the sample base, from upload to adapter."""
