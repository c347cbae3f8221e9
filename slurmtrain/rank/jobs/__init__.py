"""What every rank of a job runs, one module for each kind of job."""
