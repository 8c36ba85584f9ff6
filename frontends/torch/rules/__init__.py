"""What each ATen operator means in operators of ours."""
