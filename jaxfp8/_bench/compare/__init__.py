"""`python -m jaxfp8 compare`: what each way to multiply costs in accuracy and in time."""
