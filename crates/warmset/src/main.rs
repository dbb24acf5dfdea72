//! warmset
fn main() {}
