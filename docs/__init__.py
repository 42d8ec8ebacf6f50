"""Programs that draw, run and publish the pages of the documentation."""
