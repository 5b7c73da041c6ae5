"""Run the command line: python -m cotenant."""

from cotenant.cli import main

if __name__ == "__main__":
    main()
