//! Gives back the pages of program and libraries that only a start needed: static data of C++, the command line's
//! description, certificates, relocations. Of a program with engines in it that is most of what a gateway without
//! models had in memory. Whatever is used again comes back from the file, which the system still has in its cache.
#![expect(unsafe_code, reason = "advice about mappings has no safe interface")]

use rustix::mm::{Advice, madvise};
use std::{fs, io, ops::Range};

/// Gives back what has been read of program and libraries so far, as far as nobody has changed it.
pub fn release() -> io::Result<()> {
    for mapping in unchanged_mappings(&fs::read_to_string("/proc/self/smaps")?) {
        let place = std::ptr::with_exposed_provenance_mut(mapping.start);
        // SAFETY: the mapping is a private one of a file, nobody may write to it, and the kernel counts no page in it
        // that is not the file's: what is dropped is read from the file again when it is needed, as it was. The
        // program and its libraries, which alone are mapped like this, are never unmapped.
        unsafe { madvise(place, mapping.len(), Advice::LinuxDontNeed)? };
    }
    Ok(())
}

/// Private mappings of files that may not be written, and of which no page was replaced by one of the process's own.
fn unchanged_mappings(smaps: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut candidate = None;
    for line in smaps.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match *words {
            [range, "r--p" | "r-xp", _, _, _, file, ..] if file.starts_with('/') => candidate = range_of(range),
            ["Anonymous:", "0", "kB"] => found.extend(candidate.take()),
            // Any other mapping begins.
            [range, ..] if range_of(range).is_some() => candidate = None,
            _ => {}
        }
    }
    found
}

fn range_of(text: &str) -> Option<Range<usize>> {
    let (start, end) = text.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_file_still_has_is_given_back() {
        let mapping = |range: &str, permissions: &str, file: &str, own: u32| {
            format!("{range} {permissions} 00000000 fe:00 17 {file}\nRss: 64 kB\nAnonymous: {own} kB\nVmFlags: rd mr\n")
        };
        let smaps = [
            mapping("1000-2000", "r--p", "/bin/one", 0),
            mapping("2000-3000", "r-xp", "/bin/one", 0),
            mapping("3000-4000", "r--p", "/bin/one", 4),
            mapping("4000-5000", "rw-p", "/bin/one", 0),
            mapping("5000-6000", "r--p", "", 0),
            mapping("6000-7000", "r-xp", "[vdso]", 0),
            mapping("7000-8000", "r--s", "/dev/shm/other", 0),
        ];
        assert_eq!(unchanged_mappings(&smaps.concat()), [0x1000..0x2000, 0x2000..0x3000]);
    }

    #[test]
    fn the_program_goes_on_without_what_it_gave_back() {
        let file_bytes = || {
            let text = fs::read_to_string("/proc/self/status").expect("readable");
            let line = text.lines().find(|line| line.starts_with("RssFile")).expect("there");
            line.split_ascii_whitespace().nth(1).and_then(|count| count.parse::<u64>().ok()).expect("a number")
        };
        let before = file_bytes();
        release().expect("given back");
        let after = file_bytes();
        assert!(after < before, "{after} of {before} KiB");
        assert_eq!(format!("{:?}", "still here".split(' ').rev().collect::<Vec<_>>()), r#"["here", "still"]"#);
    }
}
