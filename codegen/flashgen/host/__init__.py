"""The process and the machine that flashgen runs on: folders, forks, logs, environment, pip."""
