"""What settings of other systems are here: one kind of table, one row in it for each verdict, a file each."""
