"""The step of one rank among many that are not there: its memory and its communication, without data or devices."""
