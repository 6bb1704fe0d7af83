use proptest::prelude::*;

use super::*;

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&format!("file://{}", folder.path().display())).unwrap();
    (folder, store)
}

#[tokio::test]
async fn only_its_tenant_can_read_a_payload() {
    let (_folder, store) = store();
    let bytes = Bytes::from(token_bytes(&[1, 70_000, 3]));
    let payload = store.put("a", bytes.clone(), TOKEN_IDS).await.unwrap();
    assert_eq!(store.put("a", bytes.clone(), TOKEN_IDS).await.unwrap(), payload);
    store.check_exists("a", &payload).await.unwrap();
    assert_eq!(store.get("a", &payload).await.unwrap(), bytes);
    assert!(matches!(store.get("b", &payload).await, Err(Error::Missing)));
    assert!(matches!(store.check_exists("b", &payload).await, Err(Error::Missing)));
    store.delete(&Key::new("a", payload.digest)).await.unwrap();
    store.delete(&Key::new("a", payload.digest)).await.unwrap();
    assert!(matches!(store.get("a", &payload).await, Err(Error::Missing)));
}

#[tokio::test]
async fn an_export_is_no_payload() {
    let (folder, store) = store();
    let exports = store.exports();
    let part = exports
        .put("a", Bytes::from_static(b"rows"), "application/jsonl")
        .await
        .unwrap();
    assert!(matches!(store.get("a", &part).await, Err(Error::Missing)));
    assert_eq!(exports.get("a", &part).await.unwrap(), "rows");
    let listed: Vec<Object> = store.objects().try_collect().await.unwrap();
    assert_eq!(listed, []);
    let listed: Vec<Object> = exports.objects().try_collect().await.unwrap();
    assert_eq!(listed.len(), 1);
    let inside = folder.path().join("export");
    assert!(
        inside.is_dir() && !folder.path().join("payload").exists(),
        "who sees this folder reads no contexts"
    );
    exports.remove("a", &part).await.unwrap();
    assert!(matches!(exports.check_exists("a", &part).await, Err(Error::Missing)));
}

#[tokio::test]
async fn a_payload_with_another_size_or_a_flipped_bit_is_refused() {
    let (folder, store) = store();
    let payload = store
        .put("a", Bytes::from_static(b"12345678"), TOKEN_IDS)
        .await
        .unwrap();
    let short = PayloadRef {
        size_bytes: 7,
        ..payload.clone()
    };
    assert!(matches!(store.check_exists("a", &short).await, Err(Error::Differs(_))));
    assert!(matches!(store.get("a", &short).await, Err(Error::Differs(_))));
    let path = folder
        .path()
        .join(Key::new("a", payload.digest).path(PAYLOADS).as_ref());
    std::fs::write(path, b"12345679").unwrap();
    store.check_exists("a", &payload).await.unwrap();
    assert!(matches!(store.get("a", &payload).await, Err(Error::Differs(_))));
}

#[test]
fn a_tenant_may_have_any_name() {
    for tenant in ["../../etc", "", "a/b", "\u{1F600}"] {
        let key = Key::new(tenant, [7; 32]);
        assert_eq!(key.path(PAYLOADS).parts().count(), 3);
        assert_eq!(Key::parse(PAYLOADS, &key.path(PAYLOADS)), Some(key));
    }
}

#[test]
fn an_incomplete_token_id_is_refused() {
    assert_eq!(token_ids(&[1, 0, 0, 0, 2]), None);
    assert_eq!(token_ids(&token_bytes(&[u32::MAX, 0])), Some(vec![u32::MAX, 0]));
}

fn experts(experts: u16) -> Experts {
    Experts {
        first: 199_000,
        layers: 3,
        per_layer: 2,
        experts,
        ids: vec![0, 1, 2, 3, 4, experts - 1, 7, 6, 5, 4, 3, 2],
    }
}

#[test]
fn expert_ids_take_one_byte_up_to_256_experts_and_two_beyond() {
    for (count, bytes) in [(8, 12), (256, 12), (257, 24), (384, 24)] {
        let original = experts(count);
        let written = original.encode().unwrap();
        assert_eq!(written.len(), 32 + bytes);
        assert_eq!(Experts::decode(&written).unwrap(), original);
        assert_eq!(
            (original.tokens(), original.of(1).unwrap()[0], original.of(2)),
            (2, 7, None)
        );
    }
}

#[test]
fn damaged_expert_ids_are_refused() {
    let good = experts(384).encode().unwrap();
    for cut in 0..good.len() {
        assert!(Experts::decode(&good[..cut]).is_err(), "{cut} bytes");
    }
    for (at, with) in [(0, b'X'), (8, 2), (12, 3), (20, 0), (22, 5), (25, 0), (26, 1), (33, 9)] {
        let mut bad = good.clone();
        bad[at] = with;
        assert!(Experts::decode(&bad).is_err(), "byte {at}");
    }
    assert!(
        Experts {
            experts: 7,
            ..experts(384)
        }
        .encode()
        .is_err()
    );
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), whole in any::<bool>()) {
        if whole && bytes.len() >= 12 {
            bytes[..8].copy_from_slice(b"SPTEXPRT");
            bytes[8..12].copy_from_slice(&[1, 0, 0, 0]);
        }
        if let Ok(experts) = Experts::decode(&bytes) {
            prop_assert_eq!(experts.encode().unwrap(), bytes);
        }
    }
}

#[tokio::test]
async fn payloads_are_listed_with_their_age_and_other_objects_are_not() {
    let (folder, store) = store();
    let payload = store.put("a", Bytes::from_static(b"1234"), TOKEN_IDS).await.unwrap();
    for other in ["payload/readme", "payload/zz/00", "elsewhere/file"] {
        let path = folder.path().join(other);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"not a payload").unwrap();
    }
    let listed = async || -> Vec<Object> { store.objects().try_collect().await.unwrap() };
    let [object] = &listed().await[..] else {
        panic!("exactly one payload is listed")
    };
    assert_eq!(object.key, Key::new("a", payload.digest));
    assert_eq!(store.written_at(&object.key).await.unwrap(), Some(object.written_at));
    store.delete(&object.key).await.unwrap();
    assert_eq!(store.written_at(&object.key).await.unwrap(), None);
    assert_eq!(listed().await, []);
}
