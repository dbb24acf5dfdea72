//! The keys of trust domains. Each domain has one, made on first use; what was written under it is gone with it.
//!
//! A key never encrypts by itself: every segment has a random salt, and the key for a domain's blocks in it is derived from
//! both, so that a place in a segment is a nonce that is never used twice.

use crate::error::StoreError;
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey},
    error::Unspecified,
    hkdf::{HKDF_SHA256, Salt},
    rand::{SecureRandom, SystemRandom},
};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, ErrorKind, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The file of keys, beside the segments.
pub(crate) const FILE_NAME: &str = "keys";
/// Its next version, until it is durable.
pub(crate) const NEXT_FILE_NAME: &str = "keys.new";
/// Trust domains that can have keys; a purge makes room.
pub const DOMAINS_MAX: usize = 65_536;
/// Each key takes less than 256 bytes in the file.
const FILE_BYTES_MAX: u64 = 256 * DOMAINS_MAX as u64;
const INFO: [&[u8]; 1] = [b"warmset kv segment 1"];
/// What stands in the file in place of a key that was destroyed there.
const NO_SECRET: [u8; 32] = [0; 32];
/// Bytes of an authentication tag.
pub(crate) const TAG_BYTES: usize = 16;

/// What a key is called in the open: random, so that it says nothing about its domain.
pub(crate) type KeyId = [u8; 16];
/// What a segment mixes into every key.
pub(crate) type SegmentSalt = [u8; 32];

/// A domain's key.
pub(crate) struct DomainKey {
    pub(crate) id: KeyId,
    secret: [u8; 32],
}

/// A domain's key in one segment.
pub(crate) struct SegmentKey(LessSafeKey);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    domain: String,
    id: String,
    key: String,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Records {
    version: u32,
    keys: Vec<Record>,
}

#[derive(Default)]
struct Known {
    by_domain: BTreeMap<[u8; 32], Arc<DomainKey>>,
    by_id: BTreeMap<KeyId, Arc<DomainKey>>,
}

/// All keys of one directory.
pub(crate) struct Keys {
    directory: PathBuf,
    random: SystemRandom,
    known: Mutex<Known>,
}

impl Keys {
    /// Reads the file of keys, if there is one. A damaged one is an error: made anew, it would take everything with it.
    pub(crate) fn open(directory: &Path) -> Result<Self, StoreError> {
        let path = directory.join(FILE_NAME);
        // A version that did not become the file may hold keys that were to be destroyed.
        match std::fs::remove_file(directory.join(NEXT_FILE_NAME)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(StoreError::directory("remove", &path)(error));
            }
            _ => {}
        }
        let known = match read(&path) {
            Ok(known) => known,
            Err(error) if error.kind() == ErrorKind::NotFound => Known::default(),
            Err(error) => return Err(StoreError::directory("read the keys of encrypted blocks in", &path)(error)),
        };
        Ok(Self { directory: directory.to_path_buf(), random: SystemRandom::new(), known: Mutex::new(known) })
    }

    /// The key of a domain, made and durable before it is used if it has none.
    pub(crate) fn of_domain(&self, domain: &[u8; 32]) -> io::Result<Arc<DomainKey>> {
        let mut known = self.lock();
        if let Some(key) = known.by_domain.get(domain) {
            return Ok(Arc::clone(key));
        }
        if known.by_domain.len() >= DOMAINS_MAX {
            return Err(io::Error::other(format!("more than {DOMAINS_MAX} trust domains have keys")));
        }
        let key = Arc::new(DomainKey { id: self.random_bytes()?, secret: self.random_bytes()? });
        known.by_domain.insert(*domain, Arc::clone(&key));
        if let Err(error) = self.write(&known) {
            known.by_domain.remove(domain);
            return Err(error);
        }
        known.by_id.insert(key.id, Arc::clone(&key));
        Ok(key)
    }

    /// The key of a domain, if it has one.
    pub(crate) fn existing(&self, domain: &[u8; 32]) -> Option<Arc<DomainKey>> {
        self.lock().by_domain.get(domain).cloned()
    }

    /// The key that is called so; none once it was destroyed.
    pub(crate) fn by_id(&self, id: &KeyId) -> Option<Arc<DomainKey>> {
        self.lock().by_id.get(id).cloned()
    }

    /// Forgets a domain's key, in memory at once and then on disk. Says whether there was one.
    pub(crate) fn destroy(&self, domain: &[u8; 32]) -> io::Result<bool> {
        let mut known = self.lock();
        let in_file = self.in_file(domain)?;
        if let Some(key) = known.by_domain.remove(domain) {
            known.by_id.remove(&key.id);
        }
        let Some(key) = in_file else { return Ok(false) };
        if let Err(error) = self.write(&known) {
            // A full disk has no room for a new file, but the old one can be written over.
            tracing::warn!(%error, "the file of keys is written over in place");
            self.write_over(&key)?;
        }
        Ok(true)
    }

    /// Random bytes from the operating system.
    pub(crate) fn random_bytes<const N: usize>(&self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.random.fill(&mut bytes).map_err(|_| io::Error::other("the operating system gives no random bytes"))?;
        Ok(bytes)
    }

    /// A domain's key as the file has it, which may be more than memory has: an earlier destruction may have failed there.
    fn in_file(&self, domain: &[u8; 32]) -> io::Result<Option<Arc<DomainKey>>> {
        match read(&self.directory.join(FILE_NAME)) {
            Ok(known) => Ok(known.by_domain.get(domain).cloned()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a key in the file one that is no key.
    fn write_over(&self, key: &DomainKey) -> io::Result<()> {
        let path = self.directory.join(FILE_NAME);
        let text = std::fs::read_to_string(&path)?;
        let at = text.find(&hex(&key.secret)).ok_or(ErrorKind::NotFound)?;
        let file = OpenOptions::new().write(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(&path)?;
        file.write_all_at(hex(&NO_SECRET).as_bytes(), at as u64)?;
        file.sync_all()
    }

    /// Writes the new file beside the old one, then takes its place; what the old one held is overwritten.
    fn write(&self, known: &Known) -> io::Result<()> {
        let keys = known.by_domain.iter().map(|(domain, key)| Record {
            domain: hex(domain),
            id: hex(&key.id),
            key: hex(&key.secret),
        });
        let text = serde_json::to_vec(&Records { version: 1, keys: keys.collect() }).map_err(io::Error::other)?;
        let (next, path) = (self.directory.join(NEXT_FILE_NAME), self.directory.join(FILE_NAME));
        let flags = OFlags::NOFOLLOW.bits().cast_signed();
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).custom_flags(flags).open(&next)?;
        file.write_all(&text)?;
        file.sync_all()?;
        let old = OpenOptions::new().write(true).custom_flags(flags).open(&path);
        std::fs::rename(&next, &path)?;
        File::open(&self.directory)?.sync_all()?;
        if let Ok(old) = old {
            // As good as a file system allows; the device may keep a copy that only its own erasure removes.
            let zeros = vec![0; usize::try_from(old.metadata()?.len().min(FILE_BYTES_MAX)).unwrap_or(0)];
            old.write_all_at(&zeros, 0)?;
            old.sync_all()?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DomainKey {
    /// The key for this domain's blocks in the segment with this salt.
    pub(crate) fn in_segment(&self, salt: &SegmentSalt) -> io::Result<SegmentKey> {
        let derived = Salt::new(HKDF_SHA256, salt).extract(&self.secret);
        let key = derived.expand(&INFO, &AES_256_GCM).map_err(unspecified)?;
        Ok(SegmentKey(LessSafeKey::new(UnboundKey::from(key))))
    }
}

impl SegmentKey {
    /// Encrypts in place. The place must never have been used with this key.
    pub(crate) fn seal(&self, place: u32, open: &[u8], secret: &mut [u8]) -> io::Result<[u8; TAG_BYTES]> {
        let sealed = self.0.seal_in_place_separate_tag(nonce(place), Aad::from(open), secret);
        let tag = sealed.map_err(unspecified)?;
        let mut bytes = [0; TAG_BYTES];
        bytes.copy_from_slice(tag.as_ref());
        Ok(bytes)
    }

    /// Decrypts in place what was encrypted for this place.
    pub(crate) fn open(
        &self,
        place: u32,
        open: &[u8],
        tag: [u8; TAG_BYTES],
        secret: &mut [u8],
    ) -> Result<(), Unspecified> {
        self.0.open_in_place_separate_tag(nonce(place), Aad::from(open), Tag::from(tag), secret, 0..)?;
        Ok(())
    }
}

fn unspecified(_: Unspecified) -> io::Error {
    io::Error::other("the cipher gives no reason")
}

fn nonce(place: u32) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&place.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

fn read(path: &Path) -> io::Result<Known> {
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.len() > FILE_BYTES_MAX {
        return Err(damaged("it is too long"));
    }
    let records: Records = serde_json::from_reader(io::BufReader::new(file)).map_err(unreadable)?;
    if records.version != 1 || records.keys.len() > DOMAINS_MAX {
        return Err(damaged("it is of another version"));
    }
    let mut known = Known::default();
    for record in records.keys {
        let parsed = (unhex(&record.domain), unhex(&record.id), unhex(&record.key));
        let (Some(domain), Some(id), Some(secret)) = parsed else { return Err(damaged("a key is malformed")) };
        if secret == NO_SECRET {
            continue;
        }
        let key = Arc::new(DomainKey { id, secret });
        known.by_domain.insert(domain, Arc::clone(&key));
        known.by_id.insert(id, key);
    }
    Ok(known)
}

fn unreadable(error: serde_json::Error) -> io::Error {
    if error.is_io() { error.into() } else { damaged(&format!("it holds no keys ({error})")) }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("{what}: restore it, or remove the directory with all its blocks"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    let mut bytes = [0; N];
    if digits.len() != 2 * N || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn keys_survive_and_are_destroyed_for_good() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE_NAME);
        let keys = Keys::open(directory.path()).unwrap();
        assert!(!path.exists(), "made on first use");
        let (first, second) = (keys.of_domain(&[1; 32]).unwrap(), keys.of_domain(&[2; 32]).unwrap());
        assert_ne!(first.id, second.id);
        assert_ne!(first.secret, second.secret);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);

        let again = Keys::open(directory.path()).unwrap();
        assert_eq!(again.by_id(&first.id).unwrap().secret, first.secret);
        assert!(again.destroy(&[1; 32]).unwrap());
        assert!(!again.destroy(&[1; 32]).unwrap());
        assert!(again.by_id(&first.id).is_none());
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&hex(&first.secret)) && text.contains(&hex(&second.secret)));
        assert!(!directory.path().join(NEXT_FILE_NAME).exists());
        assert!(Keys::open(directory.path()).unwrap().by_id(&first.id).is_none());
        assert_ne!(again.of_domain(&[1; 32]).unwrap().secret, first.secret);
    }

    #[test]
    fn a_key_is_destroyed_without_room_for_a_new_file() {
        let directory = tempfile::tempdir().unwrap();
        let keys = Keys::open(directory.path()).unwrap();
        let (first, second) = (keys.of_domain(&[1; 32]).unwrap(), keys.of_domain(&[2; 32]).unwrap());
        // Nothing can be written beside it.
        std::fs::create_dir(directory.path().join(NEXT_FILE_NAME)).unwrap();
        assert!(keys.destroy(&[1; 32]).unwrap());
        assert!(!keys.destroy(&[1; 32]).unwrap());
        std::fs::remove_dir(directory.path().join(NEXT_FILE_NAME)).unwrap();
        let text = std::fs::read_to_string(directory.path().join(FILE_NAME)).unwrap();
        assert!(!text.contains(&hex(&first.secret)));
        let again = Keys::open(directory.path()).unwrap();
        assert!(again.by_id(&first.id).is_none() && again.by_id(&second.id).is_some());
    }

    #[test]
    fn a_damaged_file_is_an_error_that_keeps_it() {
        let directory = tempfile::tempdir().unwrap();
        for text in ["", "{", r#"{"version":2,"keys":[]}"#, r#"{"version":1,"keys":[{"domain":"é","id":"","key":""}]}"#]
        {
            std::fs::write(directory.path().join(FILE_NAME), text).unwrap();
            let error = Keys::open(directory.path()).err().unwrap().to_string();
            assert!(error.contains("restore it"), "{text}: {error}");
            assert_eq!(std::fs::read_to_string(directory.path().join(FILE_NAME)).unwrap(), text);
        }
    }

    #[test]
    fn what_is_sealed_opens_only_at_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let keys = Keys::open(directory.path()).unwrap();
        let key = keys.of_domain(&[1; 32]).unwrap();
        let (here, there) = (key.in_segment(&[1; 32]).unwrap(), key.in_segment(&[2; 32]).unwrap());
        let mut secret = *b"a caller's words";
        let tag = here.seal(7, b"open", &mut secret).unwrap();
        assert_ne!(&secret, b"a caller's words");
        let sealed = secret;
        for (key, place, open) in [(&there, 7, &b"open"[..]), (&here, 8, b"open"), (&here, 7, b"closed")] {
            let mut copy = sealed;
            assert!(key.open(place, open, tag, &mut copy).is_err());
        }
        here.open(7, b"open", tag, &mut secret).unwrap();
        assert_eq!(&secret, b"a caller's words");
    }
}
