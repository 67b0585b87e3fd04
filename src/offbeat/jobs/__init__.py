"""Jobs of any launcher: settings, record, console output, metrics and the end of a job."""
