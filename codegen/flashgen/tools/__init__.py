"""What people run: the command line (``cli``), timings beside other libraries (``bench``), choosing tiles by
measurement (``tune``), and a kernel as a page (``page``) or as a folder for an editor (``editor``).
"""
