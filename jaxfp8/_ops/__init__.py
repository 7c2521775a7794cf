"""Operations in the user's terms: their checks, dtypes and axes."""
