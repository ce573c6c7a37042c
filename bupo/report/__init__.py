"""Plots and tables drawn from the files a run leaves behind; nothing here touches models or training."""
