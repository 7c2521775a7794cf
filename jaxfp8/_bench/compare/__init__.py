"""`python -m jaxfp8 compare`: accuracy and time of each way to multiply."""
