"""The files of a job, written so that a crash or a second process leaves them whole."""
