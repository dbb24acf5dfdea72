//! The contents of files, below one directory. A content has its whole length or is not there: it is written under
//! another name first. Names come from this program, never from callers.

use std::{
    collections::BTreeSet,
    fs::File,
    io,
    path::{Path, PathBuf},
};
use tokio::io::AsyncWriteExt;

/// What is being written.
const PARTIAL: &str = "partial";

/// A directory of contents.
#[derive(Debug, Clone)]
pub(crate) struct Contents {
    directory: PathBuf,
}

impl Contents {
    /// Makes the directory if it is not there.
    pub(crate) fn open(directory: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(&directory)?;
        Ok(Self { directory })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Where a content is while it is being written.
    pub(crate) fn partial_path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.{PARTIAL}"))
    }

    /// Begins to write a content.
    pub(crate) async fn create(&self, name: &str) -> io::Result<Writing> {
        let partial = self.partial_path(name);
        let file = tokio::fs::File::create(&partial).await?;
        Ok(Writing { contents: self.clone(), name: name.to_owned(), file, kept: false })
    }

    /// Gives what was written its name. It is on disk afterwards.
    pub(crate) fn publish(&self, name: &str) -> io::Result<()> {
        let partial = self.partial_path(name);
        File::open(&partial)?.sync_all()?;
        std::fs::rename(&partial, self.path(name))?;
        File::open(&self.directory)?.sync_all()
    }

    /// Removes a content; one that is gone already is fine.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        gone_is_fine(std::fs::remove_file(self.path(name)))
    }

    /// Removes contents that no record leads to: a server was killed between the two. What batches are writing stays.
    pub(crate) fn remove_others<'a>(&self, known: impl Iterator<Item = &'a str>) {
        let known: BTreeSet<&str> = known.collect();
        let Ok(entries) = std::fs::read_dir(&self.directory) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            let is_upload = name.starts_with("file-") && !known.contains(name.as_str()) && !is_answer(&name);
            if is_upload && let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!("{} belongs to nothing and cannot be removed: {error}", path.display());
            }
        }
    }
}

/// Whether a batch writes a file of this name; its record comes last.
fn is_answer(name: &str) -> bool {
    name.starts_with("file-out-") || name.starts_with("file-err-")
}

fn gone_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// A content that is being written; dropped before its end it leaves nothing.
#[derive(Debug)]
pub(crate) struct Writing {
    contents: Contents,
    name: String,
    file: tokio::fs::File,
    kept: bool,
}

impl Writing {
    pub(crate) async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes).await
    }

    /// Gives the content its name.
    pub(crate) async fn publish(mut self) -> io::Result<()> {
        self.file.flush().await?;
        let (contents, name) = (self.contents.clone(), self.name.clone());
        tokio::task::spawn_blocking(move || contents.publish(&name)).await.map_err(io::Error::other)??;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.kept {
            // What cannot be removed now is removed at the next start.
            let _ = std::fs::remove_file(self.contents.partial_path(&self.name));
        }
    }
}

/// Whether a file is there.
pub(crate) fn exists(path: &Path) -> bool {
    path.is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_content_is_whole_or_absent() {
        let directory = tempfile::tempdir().unwrap();
        let contents = Contents::open(directory.path().join("files")).unwrap();
        let mut writing = contents.create("file-a").await.unwrap();
        writing.write(b"half").await.unwrap();
        drop(writing);
        assert!(!exists(&contents.path("file-a")) && !exists(&contents.partial_path("file-a")));
        let mut writing = contents.create("file-a").await.unwrap();
        writing.write(b"whole").await.unwrap();
        writing.publish().await.unwrap();
        assert_eq!(std::fs::read(contents.path("file-a")).unwrap(), b"whole");
        contents.remove("file-a").unwrap();
        contents.remove("file-a").unwrap();
    }

    #[test]
    fn what_no_record_leads_to_is_removed_and_what_a_batch_writes_stays() {
        let directory = tempfile::tempdir().unwrap();
        let contents = Contents::open(directory.path().to_path_buf()).unwrap();
        let names = ["file-a", "file-b", "file-c.partial", "file-out-1.partial", "file-err-1", "other"];
        for name in names {
            std::fs::write(contents.path(name), b"x").unwrap();
        }
        contents.remove_others(["file-a"].into_iter());
        let left: Vec<&str> = names.into_iter().filter(|name| exists(&contents.path(name))).collect();
        assert_eq!(left, ["file-a", "file-out-1.partial", "file-err-1", "other"]);
    }
}
