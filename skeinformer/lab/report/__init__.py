"""Records in, one self-contained HTML page out: tables, pictures, what they show, and how they were made."""
