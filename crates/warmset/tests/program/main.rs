//! The built program as its users see it: exit codes, one JSON document on stdout, one line on stderr, real processes.

mod command_line;
mod serving;
mod support;
