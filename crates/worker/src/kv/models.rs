//! Whose KV lies on disk: blocks there are known by the identity of their bytes, of which nobody can tell the model.
//! So that the KV of a model that is removed can go although it was not in memory since the server began, a small file
//! beside the blocks says it for each identity.

use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
};
use warmset_core::{Digest, kv::KvIdentity};
use warmset_store::segments::NOTE_SUFFIX;

/// What is longer was not written here.
const FILE_BYTES_MAX: u64 = 1024;

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    identity: KvIdentity,
    model: Digest,
}

/// The model of each identity that is known.
#[derive(Debug, Default)]
pub(super) struct Models {
    /// None without a disk: then there is nothing to remember.
    directory: Option<PathBuf>,
    known: BTreeMap<KvIdentity, Digest>,
}

impl Models {
    /// Reads what the directory says. What cannot be read is nobody's.
    pub(super) fn read(directory: &Path) -> io::Result<Self> {
        let mut known = BTreeMap::new();
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == NOTE_SUFFIX)
                && path.metadata().is_ok_and(|found| found.is_file() && found.len() <= FILE_BYTES_MAX)
                && let Ok(text) = std::fs::read(&path)
                && let Ok(Note { identity, model }) = serde_json::from_slice(&text)
            {
                known.insert(identity, model);
            }
        }
        Ok(Self { directory: Some(directory.to_path_buf()), known })
    }

    /// An identity's model is in memory.
    pub(super) fn note(&mut self, identity: KvIdentity, model: Digest) {
        if self.known.insert(identity, model) == Some(model) {
            return;
        }
        if let Some(path) = self.path(&identity)
            && let Ok(text) = serde_json::to_vec(&Note { identity, model })
        {
            // A disk that does not answer must keep nobody. As long as this server runs, it knows without the file.
            tokio::task::spawn_blocking(move || {
                if let Err(error) = std::fs::write(&path, text) {
                    tracing::warn!(path = %path.display(), %error, "whose KV lies on disk cannot be noted");
                }
            });
        }
    }

    /// Identities of all models but these, which are not known any more. What is noted of them stays for now.
    pub(super) fn forget_all_but(&mut self, kept: &BTreeSet<Digest>) -> Vec<KvIdentity> {
        self.known.extract_if(.., |_, model| !kept.contains(model)).map(|(identity, _)| identity).collect()
    }

    /// What is noted of identities that are not known any more, to be removed.
    pub(super) fn notes_of(&self, gone: &[KvIdentity]) -> Notes {
        let gone = gone.iter().filter(|identity| !self.known.contains_key(identity));
        Notes(gone.filter_map(|identity| self.path(identity)).collect())
    }

    fn path(&self, identity: &KvIdentity) -> Option<PathBuf> {
        let name = Digest(identity.0).hex();
        self.directory.as_ref().map(|directory| directory.join(name).with_extension(NOTE_SUFFIX))
    }
}

/// Files of identities.
pub(super) struct Notes(Vec<PathBuf>);

impl Notes {
    pub(super) fn remove(self) {
        for path in self.0 {
            // What stays is found by the next start, and forgotten again.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(number: u8) -> KvIdentity {
        KvIdentity([number; 32])
    }

    #[test]
    fn what_was_noted_is_known_to_the_next_start_and_what_was_forgotten_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (Digest([1; 32]), Digest([2; 32]));
        let within = |act: &dyn Fn(&mut Models)| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let mut models = Models::read(directory.path()).unwrap();
            runtime.block_on(async { act(&mut models) });
            // Dropped, it waits for what is being written.
            drop(runtime);
            models.known
        };
        within(&|models| {
            (1..4).for_each(|number| models.note(identity(number), if number == 3 { other } else { one }))
        });
        std::fs::write(directory.path().join("strange.model"), "not one of ours").unwrap();
        assert_eq!(within(&|_| {}).len(), 3);
        let gone = [identity(1), identity(2)];
        within(&|models| assert_eq!(models.forget_all_but(&BTreeSet::from([other])), gone));
        assert_eq!(within(&|_| {}).len(), 3, "until they have left the disk");
        within(&|models| {
            models.forget_all_but(&BTreeSet::from([other]));
            // One of them is there again.
            models.note(identity(2), one);
            models.notes_of(&gone).remove();
        });
        assert_eq!(within(&|_| {}), BTreeMap::from([(identity(2), one), (identity(3), other)]));
    }
}
