//! What the store promises, on real files, with disk-full and kill -9 made by the operating system.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions, Permissions},
    io::{BufRead, BufReader, Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use warmset_core::Digest;
use warmset_store::{ARTIFACT_BYTES_MAX, QUARANTINED_FILES_MAX, Store, StoreError};

/// SHA-256 of "hello\n".
const HELLO: &str = "sha256:5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
const CHILD_STORE: &str = "WARMSET_TEST_CHILD_STORE";
const CHILD_SOURCE: &str = "WARMSET_TEST_CHILD_SOURCE";

fn write(path: &Path, bytes: &[u8]) -> PathBuf {
    File::create(path).unwrap().write_all(bytes).unwrap();
    path.to_path_buf()
}

fn quiet() -> impl FnMut(u64, u64) {
    |_, _| {}
}

fn entries(path: &Path) -> usize {
    path.read_dir().unwrap().count()
}

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Makes a stored file writable and changes it, as only root or a broken disk would.
fn overwrite(path: &Path, bytes: &[u8]) {
    std::fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    OpenOptions::new().write(true).truncate(true).open(path).unwrap().write_all(bytes).unwrap();
}

#[test]
fn a_file_is_stored_under_its_hash_read_only_and_once() {
    let directory = temporary();
    let store = Store::open(&directory.path().join("store")).unwrap();
    let source = write(&directory.path().join("a"), b"hello\n");
    let mut calls = Vec::new();
    let stored = store.import_file(&source, &mut |done, total| calls.push((done, total))).unwrap();
    assert_eq!(stored.sha256, Digest::parse(HELLO).unwrap());
    assert_eq!((stored.size_bytes, stored.existed), (6, false));
    assert_eq!(std::fs::read(&stored.path).unwrap(), b"hello\n");
    assert_eq!(stored.path.metadata().unwrap().mode() & 0o777, 0o444);
    assert_eq!(calls.first(), Some(&(0, 6)));
    assert_eq!(calls.last(), Some(&(6, 6)));

    let other = write(&directory.path().join("b"), b"hello\n");
    let again = store.import_file(&other, &mut quiet()).unwrap();
    assert!(again.existed);
    assert_eq!(again.path, stored.path);
    assert_eq!(store.list().unwrap(), [(stored.sha256, 6)]);
    assert_eq!(entries(&directory.path().join("store/tmp")), 0);
    // Neither a later write to the source nor its removal touches the copy.
    write(&source, b"other");
    std::fs::remove_file(&other).unwrap();
    assert!(store.verify_full(&stored.sha256, &mut quiet()).is_ok());
}

#[test]
fn an_untouched_file_is_verified_without_reading_it() {
    let directory = temporary();
    let store = Store::open(directory.path()).unwrap();
    let source = write(&directory.path().join("a"), &vec![7; 3 << 20]);
    let stored = store.import_file(&source, &mut quiet()).unwrap();
    assert!(!store.verify(&stored.sha256).unwrap().read_in_full);
    // A restart remembers.
    let store = Store::open(directory.path()).unwrap();
    assert!(!store.verify(&stored.sha256).unwrap().read_in_full);
    // A moved time means another full read, which finds the file intact and is remembered.
    File::open(&stored.path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    assert!(store.verify(&stored.sha256).unwrap().read_in_full);
    assert!(!store.verify(&stored.sha256).unwrap().read_in_full);
    // So does a lost or broken record.
    for broken in [None, Some("{}"), Some("not json")] {
        let record = directory.path().join("checked").join(stored.sha256.hex());
        match broken {
            None => std::fs::remove_file(&record).unwrap(),
            Some(text) => std::fs::write(&record, text).unwrap(),
        }
        assert!(store.verify(&stored.sha256).unwrap().read_in_full, "{broken:?}");
    }
}

#[test]
fn a_corrupt_file_is_quarantined_and_a_new_import_heals_it() {
    let directory = temporary();
    let store = Store::open(directory.path()).unwrap();
    let source = write(&directory.path().join("a"), b"hello\n");
    let stored = store.import_file(&source, &mut quiet()).unwrap();
    overwrite(&stored.path, b"hellO\n");
    let error = store.verify(&stored.sha256).unwrap_err();
    assert!(error.permanent);
    assert!(error.message.contains("corrupt") && error.message.contains("add the model again"), "{}", error.message);
    assert!(!store.contains(&stored.sha256));
    assert_eq!(entries(&directory.path().join("quarantine")), 1);
    let missing = store.verify(&stored.sha256).unwrap_err();
    assert!(missing.permanent && missing.message.contains("missing"), "{}", missing.message);

    assert!(!store.import_file(&source, &mut quiet()).unwrap().existed);
    assert!(store.verify(&stored.sha256).is_ok());
    // An import over a corrupt file does not trust it either.
    overwrite(&stored.path, b"h");
    assert!(!store.import_file(&source, &mut quiet()).unwrap().existed);
    assert!(store.verify_full(&stored.sha256, &mut quiet()).is_ok());
}

#[test]
fn the_quarantine_is_bounded() {
    let directory = temporary();
    let store = Store::open(&directory.path().join("store")).unwrap();
    for number in 0..QUARANTINED_FILES_MAX + 2 {
        let source = write(&directory.path().join("a"), number.to_string().as_bytes());
        let stored = store.import_file(&source, &mut quiet()).unwrap();
        overwrite(&stored.path, b"?");
        assert!(store.verify(&stored.sha256).is_err());
    }
    assert_eq!(entries(&directory.path().join("store/quarantine")), QUARANTINED_FILES_MAX);
}

#[test]
fn only_regular_files_are_taken() {
    let directory = temporary();
    let store = Store::open(&directory.path().join("store")).unwrap();
    let fifo = directory.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(directory.path().join("socket")).unwrap();
    for (path, word) in [
        (directory.path().to_path_buf(), "a directory"),
        (fifo, "a FIFO"),
        (PathBuf::from("/dev/zero"), "a device"),
        (directory.path().join("socket"), "a socket"),
    ] {
        let error = store.import_file(&path, &mut quiet()).unwrap_err();
        assert!(matches!(&error, StoreError::NotAFile { kind, .. } if *kind == word), "{path:?}: {error}");
        assert!(error.is_source_fault());
    }
    symlink(directory.path().join("x"), directory.path().join("y")).unwrap();
    symlink(directory.path().join("y"), directory.path().join("x")).unwrap();
    for path in ["x", "absent"] {
        let error = store.import_file(&directory.path().join(path), &mut quiet()).unwrap_err();
        assert!(matches!(error, StoreError::Source { .. }), "{error}");
    }
    // A link to a regular file is as good as the file.
    write(&directory.path().join("a"), b"hello\n");
    symlink(directory.path().join("a"), directory.path().join("link")).unwrap();
    let stored = store.import_file(&directory.path().join("link"), &mut quiet()).unwrap();
    assert!(stored.path.symlink_metadata().unwrap().is_file());
}

#[test]
fn a_source_larger_than_the_limit_is_refused_before_it_is_read() {
    let directory = temporary();
    let store = Store::open(directory.path()).unwrap();
    let path = directory.path().join("sparse");
    // Not every file system holds so large a sparse file; where it does, the limit must hold.
    if File::create(&path).unwrap().set_len(ARTIFACT_BYTES_MAX + 1).is_ok() {
        let error = store.import_file(&path, &mut quiet()).unwrap_err();
        assert!(matches!(error, StoreError::TooLarge { .. }), "{error}");
    }
}

#[test]
fn a_source_that_changes_while_it_is_read_is_noticed() {
    let directory = temporary();
    let store = Store::open(&directory.path().join("store")).unwrap();
    let path = write(&directory.path().join("a"), &vec![1; 3 << 20]);
    // On a file system with reflinks the first call comes after the snapshot: then the import is right to succeed.
    let mut writer = OpenOptions::new().append(true).open(&path).unwrap();
    let mut changed = false;
    let result = store.import_file(&path, &mut |_, _| {
        if !changed {
            writer.write_all(b"more").unwrap();
            changed = true;
        }
    });
    match result {
        Err(StoreError::SourceChanged { .. }) => assert!(store.list().unwrap().is_empty()),
        Ok(stored) => assert!(store.verify_full(&stored.sha256, &mut quiet()).is_ok()),
        Err(other) => panic!("{other}"),
    }
    let truncated = write(&directory.path().join("b"), &vec![1; 3 << 20]);
    let writer = OpenOptions::new().write(true).open(&truncated).unwrap();
    let result = store.import_file(&truncated, &mut |_, _| writer.set_len(10).unwrap());
    assert!(!matches!(result, Ok(ref stored) if store.verify_full(&stored.sha256, &mut quiet()).is_err()));
    assert_eq!(entries(&directory.path().join("store/tmp")), 0);
}

#[test]
fn unreferenced_files_are_removed_and_others_stay() {
    let directory = temporary();
    let store = Store::open(&directory.path().join("store")).unwrap();
    let keep = |name: &str, bytes: &[u8]| {
        store.import_file(&write(&directory.path().join(name), bytes), &mut quiet()).unwrap().sha256
    };
    let (first, second) = (keep("a", b"hello\n"), keep("b", b"12345678"));
    let removed = store.remove_unreferenced(&BTreeSet::from([first])).unwrap();
    assert_eq!((removed.files, removed.bytes), (1, 8));
    assert!(store.verify(&first).is_ok() && !store.contains(&second));
    assert_eq!(entries(&directory.path().join("store/checked")), 1);
}

/// Imports in a child process; only does something when one of the tests below starts it.
#[test]
fn child_imports() {
    let (Ok(root), Ok(source)) = (std::env::var(CHILD_STORE), std::env::var(CHILD_SOURCE)) else { return };
    let store = Store::open(Path::new(&root)).unwrap();
    let mut announced = false;
    let result = store.import_file(Path::new(&source), &mut |_, _| {
        if !announced {
            announced = true;
            eprintln!("importing");
            // Held here until the parent kills this process or closes the pipe.
            let _ = std::io::stdin().read(&mut [0]);
        }
    });
    eprintln!(
        "{}",
        result.map_or_else(|error| format!("disk full: {} {error}", error.is_disk_full()), |_| "done".into())
    );
}

fn child(root: &Path, source: &Path, shell: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", shell, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["child_imports", "--exact", "--nocapture"])
        .env(CHILD_STORE, root)
        .env(CHILD_SOURCE, source)
        .stderr(Stdio::piped())
        .stdout(Stdio::null());
    command
}

#[test]
fn a_full_disk_is_a_clear_error_and_leaves_nothing() {
    let directory = temporary();
    let root = directory.path().join("store");
    let source = write(&directory.path().join("a"), &vec![1; 3 << 20]);
    // A file size limit of 1 MiB stands for the full disk; the signal that comes with it is ignored.
    let output =
        child(&root, &source, "trap '' XFSZ; ulimit -f 1024; exec \"$@\"").stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("disk full: true no room for 3145728 bytes in"), "{text}");
    assert_eq!(entries(&root.join("tmp")) + entries(&root.join("blobs")), 0);
    assert!(Store::open(&root).unwrap().import_file(&source, &mut quiet()).is_ok());
}

#[test]
fn kill_9_in_mid_import_leaves_a_store_that_opens_and_imports() {
    let directory = temporary();
    let root = directory.path().join("store");
    let source = write(&directory.path().join("a"), &vec![1; 3 << 20]);
    let mut process = child(&root, &source, "exec \"$@\"").stdin(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "importing"));
    assert_eq!(entries(&root.join("tmp")), 1);
    // While it is being written, another opener does not take it for a leftover.
    drop(Store::open(&root).unwrap());
    assert_eq!(entries(&root.join("tmp")), 1);
    process.kill().unwrap();
    process.wait().unwrap();

    let store = Store::open(&root).unwrap();
    assert_eq!(entries(&root.join("tmp")), 0);
    assert!(store.list().unwrap().is_empty());
    let stored = store.import_file(&source, &mut quiet()).unwrap();
    assert!(store.verify_full(&stored.sha256, &mut quiet()).is_ok());
}
