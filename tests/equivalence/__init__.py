"""A covering array over what a run can be told, and the step test that each row of it passes."""
