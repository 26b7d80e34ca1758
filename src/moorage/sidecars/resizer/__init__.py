"""The resizer: volumes grow, and change their attributes class. Start reading at: `run.Resizer`."""
